"""Environment variables that change how fast a step is, how much memory it takes, or how it rounds."""

from __future__ import annotations

import os
import re

_NAMES = """
ATEN_CPU_CAPABILITY GLIBC_TUNABLES LD_PRELOAD MALLOC_CONF

OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY GOMP_CPU_AFFINITY GOMP_SPINCOUNT
KMP_AFFINITY KMP_BLOCKTIME KMP_FORCE_REDUCTION KMP_HW_SUBSET KMP_LIBRARY
MKL_CBWR MKL_DOMAIN_NUM_THREADS MKL_ENABLE_INSTRUCTIONS MKL_INTERFACE_LAYER MKL_THREADING_LAYER OPENBLAS_CORETYPE
ONEDNN_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA
DNNL_CPU_ISA_HINTS DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA

CUBLAS_EMULATION_STRATEGY CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_MODULE_DATA_LOADING CUDA_MODULE_LOADING
CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_SCALE_LAUNCH_QUEUES
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG
TORCHINDUCTOR_CPP_MARCH TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_SEARCH_SPACE TORCHINDUCTOR_NUMERICS TRITON_F32_DEFAULT

GLOO_DEVICE_TRANSPORT GLOO_SOCKET_IFNAME NCCL_ALGO NCCL_CTA_POLICY NCCL_IB_HCA NCCL_LAUNCH_MODE NCCL_NET
NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN NCCL_P2P_LEVEL NCCL_PROTO NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_TUNER_PLUGIN
"""

RECORDED = frozenset(_NAMES.split())
"""Variables whose values the fingerprint shows, even if the values are words, unless a word looks like a secret. The
names are from PyTorch's code and the documentation of CUDA, NCCL, OpenMP and the CPU libraries. Words in other
variables are not shown: they can be secrets."""

_PLAIN = re.compile(r"(?i)[+-]?\d{1,10}(\.\d{1,3})?[kmg]?b?|true|false|yes|no|on|off")
"""Matches numbers, sizes and switches, which the fingerprint shows for each variable of the families below."""

_FAMILIES = re.compile(
    r"(ATEN|OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|MALLOC|GLOO|NCCL|CUDA|CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|TORCH"
    r"|TORCHINDUCTOR|PYTORCH|TRITON)_.+"
)
_NO_SETTINGS = re.compile(
    # Paths and log settings change no number; the GPUs that CUDA_VISIBLE_DEVICES shows are in the fingerprint already.
    r".*(_HOME|_PATH|_DIR|_DIRECTORY|_FILE|_LOGS?|_LOG_LEVEL|_VERSION)|NCCL_DEBUG.*|CUDA_VISIBLE_DEVICES"
)
_MAY_BE_SECRET = re.compile(r"://|@|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20}")
"""Matches an address, or a word with 20 letters and digits, such as an access token; no setting looks like this."""


def settings() -> dict[str, str | None]:
    """Return the variables that are set, by name. None stands for a value that may be a secret.

    Not even a digest of such a value is recorded: a short secret can be guessed and compared with its digest.
    """
    return {
        name: value if _PLAIN.fullmatch(value) or (name in RECORDED and not _MAY_BE_SECRET.search(value)) else None
        for name, value in sorted(os.environ.items())
        if name in RECORDED or (_FAMILIES.fullmatch(name) and not _NO_SETTINGS.fullmatch(name))
    }
