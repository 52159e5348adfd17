"""Names of the files that a record consists of, relative to the folder of its comparison or of its sweep."""

from __future__ import annotations

# --- of a comparison ---------------------------------------------------------------------------------------------

RESULT = "result.json"  # `optexp.result.Result`, which the other files explain
REPORT = "report.html"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
SAMPLES = "samples.parquet"
CARD, CARD_PICTURE = "card.md", "plots/card.png"
WATERFALL = "plots/waterfall.png"
COMPILER_PAGE = "compiler.html"
REPRO, REPRO_OBJECTS = "repro.py", "repro.pkl"
PATCH = "optimized.patch"
STACK = "strategy.yaml"  # a search's winner, as a choice of the group `strategy`
TRACES, FLAME_GRAPHS, NSIGHT, COMPILER, MEMORY, CODE = "traces", "flamegraphs", "nsight", "compiler", "memory", "code"
TRIALS = "trials"  # folder: a search's comparisons, each with a record of its own
REPLACED = "by_itself"  # folder: the record of a sweep's job before the job was measured again

# --- of a sweep or a study ---------------------------------------------------------------------------------------

RANKING = "sweep.json"
SWEEP_PAGE, STUDY_PAGE = "sweep.md", "study.md"
HEAT_MAP, SPEEDUPS = "plots/heat_map.png", "plots/speedup.png"
TABLE_CSV, TABLE_MARKDOWN = "table.csv", "table.md"

# --- written by Hydra when a job starts --------------------------------------------------------------------------

HYDRA_CONFIG, HYDRA_SETTINGS = ".hydra/config.yaml", ".hydra/hydra.yaml"
HYDRA_OVERRIDES = ".hydra/overrides.yaml"

LOGGED = (
    RESULT, REPORT, CONFIG, ENVIRONMENT, SAMPLES, REPRO, REPRO_OBJECTS, PATCH, CARD, TABLE_CSV, TABLE_MARKDOWN, STACK,
    RANKING, SWEEP_PAGE, STUDY_PAGE, f"{TRACES}/*.json.gz", f"{FLAME_GRAPHS}/*", f"{NSIGHT}/*-rep", "plots/*.png",
    f"{CODE}/**/*", COMPILER_PAGE, f"{COMPILER}/**/*", f"{MEMORY}/*.pickle",
)  # fmt: skip
"""Patterns of the files that MLflow keeps."""
