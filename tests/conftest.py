"""Settings and fixtures of all tests: one thread, a check for leaks, and clones of the working tree."""

from __future__ import annotations

import fcntl
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import settings

from pipeline import environment
from pipeline.params import parse
from pipeline.processes import importing

if TYPE_CHECKING:  # the process that distributes the tests must not load torch
    from pipeline.data.prepared import Dataset

ROOT = Path(__file__).parent.parent

# Set before a test imports torch: with more threads, the tests that run side by side would slow each other down.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ["DVC_NO_ANALYTICS"] = "1"  # without this repository's settings, DVC would send usage data
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so in a shell's background, where tests could interrupt nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("fuzz", max_examples=10_000, deadline=None)
settings.load_profile("quick")

SET_BY_LIBRARIES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}
"""Variables that pytest, torch and scikit-learn set or change while a test runs."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:  # noqa: ARG001
    """Return the number of xdist workers. On a machine with GPUs it is one, because some tests check a GPU's memory."""
    return 1 if environment.machine().gpus else max(1, min(4, int(environment.cores())))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose services are missing. Without a GPU mark the GPU tests as ``rehearsal``, for `make rehearse`."""
    for item in items:
        if item.get_closest_marker("services") and not os.environ.get("SERVICES_IMAGE"):
            item.add_marker(pytest.mark.skip(reason="needs Docker and the image: make services-check"))
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpus and environment.machine().gpus == 0:
        for item in of_gpus:
            item.add_marker(pytest.mark.rehearsal)


COLLECTION = ExitStack()
COLLECTION.enter_context(importing())


def pytest_collection_finish(session: pytest.Session) -> None:  # noqa: ARG001
    """If a collected test starts ranks, start the server that forks them.

    A server that a test starts in a directory of its own could not import the project's modules, so each rank would
    have to import them.
    """
    COLLECTION.close()
    if "tests.ranks" in sys.modules:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _two_gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without a GPU, run a GPU test with two simulated GPUs, or skip it if its mark names what only a real GPU has."""
    marked = request.node.get_closest_marker("gpu")
    if marked is None or environment.machine().gpus:
        yield
    elif marked.args:
        pytest.skip(f"needs a GPU: {marked.args[0]}")
    else:
        from tests.as_if_cuda import as_if_cuda

        with as_if_cuda(2):
            yield


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves environment variables, a process group or another state of torch behind, and clean up
    after it what can be cleaned up. Forget the modules of its own folder, whose names other tests use, too."""
    before, torch_before = dict(os.environ), _state_of_torch()
    yield
    if folder := request.node.funcargs.get("tmp_path"):
        own = [name for name, module in sys.modules.items() if _is_in(folder, getattr(module, "__file__", None))]
        for name in own:
            del sys.modules[name]
    leaked = {name for name, _ in before.items() ^ os.environ.items()} - SET_BY_LIBRARIES
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    group = False
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        group = dist.is_available() and dist.is_initialized()
        if group:
            dist.destroy_process_group()
    if leaked:
        pytest.fail(f"the test leaked environment variables: {', '.join(sorted(leaked))}")
    if group:
        pytest.fail("the test leaked a process group")
    if torch_before and torch_before != (torch_after := _state_of_torch()):
        pytest.fail(f"the test left another state of torch behind: {torch_after}, before: {torch_before}")


def _is_in(folder: Path, file: object) -> bool:
    return isinstance(file, str) and file.startswith(f"{folder}{os.sep}")


def _state_of_torch() -> dict[str, object]:
    """Return the hooks and settings that hold for the whole process, except switches that every training sets; empty
    if torch is not loaded."""
    if not {"torch.nn.modules.module", "torch.optim.optimizer"} <= sys.modules.keys():
        return {}
    import torch

    globals_of = (vars(sys.modules[name]) for name in ("torch.nn.modules.module", "torch.optim.optimizer"))
    hooks = (item for names in globals_of for item in names.items() if item[0].startswith("_global_"))
    asked = (torch.get_default_dtype, torch.get_num_threads, torch.is_grad_enabled, torch.get_float32_matmul_precision,
             torch.are_deterministic_algorithms_enabled)  # fmt: skip
    return {name: len(of) for name, of in hooks if isinstance(of, dict)} | {ask.__name__: ask() for ask in asked}


SHORT: dict[str, Any] = {
    "fetch.dataset": "digits",
    "train.device": "cpu",
    "train.seeds": [0],
    "train.epochs": 1,
    "train.batch_size": 64,
    "bench": {"max_rounds": 1, "window_seconds": 0.05},
    "profile.variants": [],
    "publish.live": False,
}
"""Settings of params.yaml for a job of seconds, as ``Clone`` takes them."""


class Terminal(io.StringIO):
    """A text stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """``open_terminal()`` replaces standard error with a ``Terminal``, on which tqdm shows even fast progress, and
    returns it."""

    def make() -> Terminal:
        shown, seconds = Terminal(), itertools.count()
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr("tqdm.std.time", lambda: float(next(seconds)))
        return shown

    return make


Once = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Once:
    """``once(name, make)`` returns a folder that ``make`` has filled, in the first of xdist's workers that asks for it.
    Tests must not change it."""

    def made(name: str, make: Callable[[Path], None]) -> Path:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "once" / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = folder.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def digits_folder(once: Once) -> Path:
    """The folder of the prepared data set of scikit-learn's 8x8 digits: real data that need no network."""

    def make(folder: Path) -> None:
        from pipeline.data import packing, sources

        config = parse({"fetch": {"dataset": "digits"}, "variants": {"baseline": {}}})
        sources.fetch(config.fetch, folder / "raw")
        packing.prepare(config, folder / "raw", folder / "prepared")

    return once("digits", make) / "prepared"


@pytest.fixture(scope="session")
def digits(digits_folder: Path) -> Dataset:
    """The prepared digits as an open data set."""
    from pipeline.data import prepared

    return prepared.read(digits_folder)


@pytest.fixture(scope="session")
def empty_database(once: Once) -> Path:
    """An empty embedded store of MLflow, shared by the tests because creating one takes seconds."""

    def make(folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        MlflowClient(f"sqlite:///{folder}/mlflow.db")

    return once("store", make) / "mlflow.db"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty git repository the current directory."""
    path = tmp_path / "repository"
    path.mkdir()
    monkeypatch.chdir(path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    return path


@pytest.fixture
def workspace(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, furnished like a checkout in which stages can run, with the test module's ``PARAMS``."""
    from tests import workspaces

    workspaces.enter(tmp_path, monkeypatch, getattr(request.module, "PARAMS", workspaces.PARAMS))
    return tmp_path


@pytest.fixture(scope="session")
def made_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a compared job, as `dvc repro` leaves them. Tests get a copy of it from ``job``."""
    from pipeline import cli
    from tests import jobs

    root = tmp_path_factory.mktemp("job")
    jobs.write_job(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert cli.main(["compare"]) == 0
    jobs.record(root)
    return root


@pytest.fixture
def job(made_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``made_job`` as the current directory."""
    from pipeline.environment import code
    from tests import jobs

    root = tmp_path / "job"
    shutil.copytree(made_job, root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(code, "of_stage", jobs.OF_STAGE)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing listens there: refused files are not sent
    return root


class Clone:
    """A git repository with the working tree's files under ``only``, uncommitted ones included. It has its own DVC
    caches."""

    def __init__(self, path: Path, params: dict[str, Any], only: str = ".") -> None:
        self.path = path
        source = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z", only]
        listed = subprocess.run(source, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, listed):
            if (ROOT / name).is_file():  # not deleted in the working tree
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name)
        self.run("git", "init", "--quiet")
        self.commit(params)

    @classmethod
    def at(cls, path: Path) -> Clone:
        """Return the clone that is at ``path`` already, or whose folder is there."""
        clone = cls.__new__(cls)
        clone.path = path
        return clone

    def edit(self, params: dict[str, Any]) -> None:
        """Set keys of params.yaml, given as dotted paths. A variant whose value is None is removed."""
        file = self.path / "params.yaml"
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        for dotted, value in params.items():
            *parents, last = dotted.split(".")
            section = values
            for parent in parents:
                section = section[parent]
            if value is None and parents == ["variants"]:
                del section[last]
            else:
                section[last] = value
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def commit(self, params: dict[str, Any] | None = None) -> None:
        """Set these keys of params.yaml, and commit all that differs."""
        if params:
            self.edit(params)
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--allow-empty", "--message", "state")

    def ended(self, *command: str, **variables: str) -> tuple[int, str]:
        """Run a command in the clone; return its exit status, and its output with stderr."""
        done = subprocess.run(
            command,
            cwd=self.path,
            env=self.environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def run(self, *command: str, fails: bool = False, **variables: str) -> str:
        """Run a command in the clone; return its output with stderr. Fail the test if the exit status is unexpected."""
        status, output = self.ended(*command, **variables)
        if (status != 0) is not fails:
            pytest.fail(f"{' '.join(command)} ended with {status}:\n{output}")
        return output

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a command. With them, git and DVC ignore this machine's settings."""
        private = self.path.parent / f"{self.path.name}.private"
        isolated = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **{
                f"GIT_{role}_{what}": "test@example.org"
                for role in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
            "DVC_NO_ANALYTICS": "1",
            "DVC_GLOBAL_CONFIG_DIR": str(private),
            "DVC_SYSTEM_CONFIG_DIR": str(private),
            "DVC_SITE_CACHE_DIR": str(private),
        }
        ours = ("GIT_", "DVC_", "PYTHONDONTWRITEBYTECODE")
        outside = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return outside | isolated | dict(variables)


@pytest.fixture
def clone(tmp_path: Path) -> Callable[..., Clone]:
    """``clone(params)`` returns a committed clone of the working tree. ``params``: as in ``Clone.edit``."""

    def make(params: dict[str, Any] | None = None) -> Clone:
        path = tmp_path / f"clone-{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        return Clone(path, params or {})

    return make
