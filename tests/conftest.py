"""What all tests share: experiments composed as the command line composes them, and a Hydra that forgets."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from optexp.__main__ import main
from optexp.comparison import gpu_lock
from optexp.config import Experiment, overrides, resolve, search_path
from optexp.equivalence import footprint
from optexp.profiling import calibration
from optexp.support.interrupting import SIGNALS
from optexp.sweeps import exit_status

os.environ["XDG_CACHE_HOME"] = str(Path.home() / ".cache" / "optexp-tests")  # what tests learn is not the user's
if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # side by side: their threads share the cores
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the programs that they start
    gpu_lock.FOLDER = Path(mkdtemp())  # a lock of each process: who tests side by side shares the card
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: kernels then run in Python
calibration._measure_cpu = cache(calibration._measure_cpu)  # the ceilings of this machine, once for every comparison


# Tests with many parameters that take one way through the code: of so many one runs every day, the others are slow.
THINNED = {
    "test_gradgradcheck": 8,
    "test_gradcheck": 16,
    "test_any_layout": 8,
    "test_ops_are_registered_as_torch_wants_them": 20,
    "test_as_good_as_the_reference": 16,
    "test_every_way_sums_the_same": 12,
    "test_every_way": 8,
    "test_every_piece_gives_the_same": 16,
    "test_a_result_can_be_written_to": 2,
    "test_compiles_without_a_graph_break": 5,
    "test_a_model_is_like_itself": 3,
    "test_a_wrong_second_implementation_is_caught": 4,
    "test_a_second_implementation_of_what_counts": 2,
    "test_it_computes_what_the_program_computes": 6,
    "test_what_is_right_at_the_first_step_alone_is_caught_at_a_later_one": 2,
    "test_honest_candidates_pass": 2,
    "test_a_step_is_observed_and_restored": 2,
    "test_honest_steps_raise_no_alarm": 3,
    "test_autocast_passes_its_precision_contract": 3,
    "test_a_study_is_several_jobs_that_have_what_it_names": 8,
    "test_a_model_however_it_is_given": 2,
    "test_honest_candidates_pass_on_every_seed": 9,
    "test_honest_training_passes_on_every_seed": 9,
    "test_cheats_are_caught": 12,
    "test_honest_controls_pass": 80,
    "test_honest_training_stays_within_its_envelope": 4,
    "test_the_patched_file_is_the_program_that_was_verified": 3,
    "test_an_unguarded_script_and_classes_that_no_file_holds": 2,
    "test_interrupting_ends_everything_and_marks_the_run_killed": 2,
    "test_a_study_leaves_its_answer": 2,
    "test_objects_given_from_python_lie_beside_it": 3,
    "test_dropout_is_verified_at_0_and_at_its_rate": 2,
    "test_every_mode_of_the_mlp_against_itself": 3,
    "test_mutants_of_training_are_caught": 3,
    "test_mutants_of_gradients_are_caught": 3,
    "test_weights_that_steps_change_are_no_cheats": 2,
    "test_mutants_are_caught_at_full_precision": 2,
    "test_many_gradients_at_once": 4,
    "test_autocast_gives_the_dtypes_it_gives_the_reference": 4,
    "test_the_transforms_of_torch_func_and_forward_mode": 4,
    "test_infinite_parameters_of_the_norm": 3,
    "test_a_large_mean": 4,
    "test_groups_are_added_up": 4,
    "test_gradients_by_every_way": 4,
    "test_norms_of_any_kind_can_be_verified": 2,
    "test_the_verdict_is_the_same_however_little_is_held": 3,
    "test_gradients_of_the_inputs_are_compared": 3,
    "test_another_mask_in_backward_shows": 3,
    "test_a_broken_link_fails_the_build": 3,
    "test_what_was_reserved_is_there": 2,
    "test_cheats_beyond_their_process_are_caught": 3,
    "test_some_steps_of_a_study": 3,
    "test_products_dominate_on_a_cpu": 3,
    "test_lower_precision_is_for_processors_that_have_it": 2,
    "test_programs_in_other_dtypes": 2,
    "test_infinite_weights": 2,
    "test_models_made_of_others_for_inference_are_no_cheats": 2,
    "test_weights_that_nobody_changes_may_be_folded_once": 2,
    "test_honest_ways_to_draw_are_alike": 3,
    "test_what_is_made_once_may_be_made_before_or_elsewhere": 3,
    "test_gradients_of_few_rows_come_out_of_one_launch": 8,
    "test_a_whole_file_takes_the_place_of_another": 3,
    "test_commands_keep_their_names": 2,
    "test_another_step_is_verified_if_nothing_differs": 6,
    "test_an_average_of_the_parameters_is_compared": 2,
    "test_sparse_gradients_are_verified": 3,
    "test_what_is_not_finite_goes_where_the_reference_lets_it": 3,
    "test_what_is_not_finite": 3,
    "test_what_is_not_finite_stays_in_its_row": 2,
    "test_changes_beside_the_optimizer_are_compared": 2,
    "test_a_solution_is_judged": 2,
    "test_what_differs_is_said": 3,
    "test_a_program_computes_the_same_without_its_cause": 3,
    "test_errors_show_the_users_own_traceback_and_only_that": 2,
    "test_wrong_masks_are_seen": 2,
    "test_an_update_that_is_small_beside_what_the_forward_changes_is_compared": 3,
    "test_a_file_that_replays_is_verified_against_the_plain_one": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items)
    skip_where_there_is_no_gpu(items)


def pytest_collection_finish() -> None:
    """What imports have made stays: the collector need not look through it again, half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for those who count at exit what is left


def thin(items: list[pytest.Item]) -> None:
    met = dict.fromkeys(THINNED, 0)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name not in met or item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        if met[name] % THINNED[name]:
            item.add_marker(pytest.mark.slow)
        met[name] += 1


def skip_where_there_is_no_gpu(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _forget_hydra() -> Iterator[None]:
    """Hydra keeps the last job in singletons; no test should see another's."""
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """Dynamo counts its graphs for the whole process, and keeps them."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) and dynamo.utils.counters:
        for forget in (dynamo.reset, dynamo.utils.counters.clear, dynamo.utils.clear_compilation_metrics):
            forget()


@pytest.fixture(autouse=True)
def _few_later_steps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Of later training steps that are compared in this process, those of 0.2 s; one page's test reads the constant."""
    if request.path.name != "test_verification_page.py":
        monkeypatch.setattr(footprint, "LIMIT_S", 0.2)


@pytest.fixture(autouse=True)
def _the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of comparisons in this process: what a test expects must not depend on luck."""
    monkeypatch.setattr("optexp.support.draws.token_hex", lambda count: "of the tests")


@pytest.fixture
def interpreted() -> None:
    """Our kernels run on a CPU, by Triton's interpreter, as they do where no GPU is to be seen."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the GPU here")


@pytest.fixture
def experiment() -> Callable[..., Experiment]:
    """The experiment that these command-line arguments describe."""

    def of(*arguments: str) -> Experiment:
        search_path.register()
        with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
            return resolve(compose("config", overrides=overrides.rewrite(list(arguments))))

    return of


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs `optexp <arguments>` in an empty folder and in this process; gives its exit status."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["optexp", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    monkeypatch.setattr(exit_status, "_finished", [])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that what `main` sets is undone
    monkeypatch.delenv("HYDRA_FULL_ERROR")
    monkeypatch.chdir(tmp_path)
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield call
    for number, handler in handlers:
        signal.signal(number, handler)


@pytest.fixture
def in_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the job were one of several."""
    monkeypatch.setattr(search_path, "in_sweep", lambda: True)
