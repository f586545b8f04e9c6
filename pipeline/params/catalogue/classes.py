"""Where each technique's class is, in the order in which they apply.

The memory format is set on the bare model, checkpointing changes the bare model's blocks, and the
parallelism wraps whatever is there. The compiler comes after it, and takes what is inside. Of the forward
pass's wrappers the later one is the outer one: the input changes its format inside autocast, and the loss
is divided last. A CUDA graph records all of a step, and cuDNN's search is on around it. Techniques of other
packages (``extra:``) come after all of these, in the order in which the variant names them: they get the
wrapped model, and what they put around a part of the step is the outermost.
"""

from __future__ import annotations

TECHNIQUE_CLASSES = {
    "expandable_segments": "allocators.ExpandableSegments",
    "channels_last": "channels_last.ChannelsLast",
    "sync_batchnorm": "sync_batchnorm.SyncBatchNorm",
    "activation_checkpointing": "activation_checkpointing.ActivationCheckpointing",
    "selective_checkpointing": "activation_checkpointing.SelectiveCheckpointing",
    "checkpointing_budget": "checkpointing_budget.CheckpointingBudget",
    "foreach_optimizer": "optimizer_choices.ForeachOptimizer",
    "for_loop_optimizer": "optimizer_choices.ForLoopOptimizer",
    "factored_optimizer": "optimizer_choices.FactoredOptimizer",
    "low_bit_optimizer": "low_bit_optimizer.LowBitOptimizer",
    "data_parallel": "data_parallel.DataParallel",
    "bucket_mb": "ddp.BucketSize",
    "gradients_beside_buckets": "ddp.GradientsBesideBuckets",
    "static_graph": "ddp.StaticGraph",
    "ddp": "ddp.DDP",
    "zero1": "zero1.Zero1",
    "fp16_compression": "communication.FP16Compression",
    "bf16_compression": "communication.BF16Compression",
    "powersgd": "communication.PowerSGD",
    "post_local_sgd": "communication.PostLocalSGD",
    "fsdp": "fsdp.FSDP",
    "pipeline": "pipeline_parallel.Pipeline",
    "tensor": "tensor.Tensor",
    "compile": "compile.Compile",
    "bf16": "precision.BFloat16",
    "fp16": "precision.Float16",
    "activation_offload": "activation_offload.ActivationOffload",
    "gradient_accumulation": "gradient_accumulation.GradientAccumulation",
    "auto_micro_batch": "gradient_accumulation.AutoMicroBatch",
    "zeroed_gradients": "optimizer_choices.ZeroedGradients",
    "optimizer_in_backward": "optimizer_in_backward.OptimizerInBackward",
    "release_cache": "allocators.ReleaseCache",
    "tf32": "tf32.TF32",
    "cuda_graph": "cuda_graph.CudaGraph",
    "cudnn_benchmark": "cudnn_benchmark.CudnnBenchmark",
    "resident_data": "data_loading.ResidentData",
    "streamed_data": "data_loading.StreamedData",
    "dataloader": "data_loading.DataLoaderData",
    "weak_scaling": "scaling.WeakScaling",
}
"""Name -> module under pipeline/techniques, and class. A job imports what it applies: some bring much of torch."""
