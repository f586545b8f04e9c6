"""The files of measurements: ``results/<variant>.json``, ``results/<variant>/history.csv`` and ``bench.json``.

``records`` and ``bench_file`` define their content, ``files`` reads and writes them, and ``contradictions`` finds
figures that cannot have been measured.
"""

from pipeline.results.bench_file import (
    Arm,
    Bench,
    Flops,
    Ledger,
    Ledgers,
    Session,
    kind_of,
    rejected,
    rejections,
    sessions_of,
)
from pipeline.results.files import (
    BENCH_FILE,
    INFERENCE,
    KEPT_BENCHES,
    MODELS,
    PROFILES,
    REPORTS,
    RESULTS,
    SESSIONS,
    ResultError,
    adding_to_history,
    differing,
    digest,
    history_file,
    history_row,
    inference_file,
    model_file,
    profile_directory,
    read,
    read_bench,
    read_document,
    read_history,
    read_sessions,
    read_values,
    result_file,
    sha256,
    stage_of,
    system_file,
    train_again,
    write,
    write_history,
)
from pipeline.results.records import (
    Dataset,
    Document,
    HistoryRow,
    R,
    Record,
    Result,
    Run,
    Score,
    Setup,
    Summary,
    Unit,
    VariantDocument,
    Window,
    summarise,
)

__all__ = [
    "BENCH_FILE", "INFERENCE", "KEPT_BENCHES", "MODELS", "PROFILES", "REPORTS", "RESULTS", "SESSIONS", "Arm", "Bench",
    "Dataset", "Document", "Flops", "HistoryRow", "Ledger", "Ledgers", "R", "Record", "Result", "ResultError", "Run",
    "Score", "Session", "Setup", "Summary", "Unit", "VariantDocument", "Window", "adding_to_history", "differing",
    "digest", "history_file", "history_row", "inference_file", "kind_of", "model_file", "profile_directory", "read",
    "read_bench", "read_document", "read_history", "read_sessions", "read_values", "rejected", "rejections",
    "result_file", "sessions_of", "sha256", "stage_of", "summarise", "system_file", "train_again", "write",
    "write_history",
]  # fmt: skip
