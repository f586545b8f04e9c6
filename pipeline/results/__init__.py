"""The files of measurements: ``results/<variant>.json``, ``results/<variant>/history.csv`` and ``bench.json``.

``records`` and ``bench_file`` define the content of the files. ``files`` reads and writes them, and refuses
figures that cannot have been measured.
"""

from pipeline.results.bench_file import Arm, Bench, Flops, Ledger, Ledgers, SameJob, Session, sessions_of
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
    contradictions,
    contradictions_of_history,
    digest,
    history_file,
    history_row,
    inference_file,
    model_file,
    profile_directory,
    read,
    read_bench,
    read_document,
    read_documents,
    read_history,
    read_sessions,
    read_values,
    result_file,
    session_files,
    stage_of,
    system_file,
    train_again,
    write,
    write_history,
)
from pipeline.results.records import (
    Arithmetic,
    DatasetFacts,
    Document,
    Exchange,
    HistoryRow,
    Record,
    Result,
    Run,
    RunConditions,
    ScoreName,
    Unit,
    VariantDocument,
    Window,
    over_seeds,
    summarise,
)
