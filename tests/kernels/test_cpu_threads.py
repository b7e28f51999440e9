"""Work that is shared out among threads is done once, whoever does it."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue

import pytest
import torch
from numba.np.numpy_support import carray
from processes import GUARD

from nemo_fp8_debug.kernels import count_histogram, quantization_sums
from nemo_fp8_debug.kernels.cpu.jit import JOB, CompiledJob, compile_job, counts_at, take_next_share
from nemo_fp8_debug.kernels.cpu.threads import run_job_shares
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.recipe import parse_recipe

SHARES = 40


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def squaring() -> CompiledJob:
    """Adds the square of its number, and of one that the job holds, to what each share has written."""

    @compile_job
    def square(job: int) -> None:
        numbers = carray(counts_at(job), JOB + SHARES)
        while True:
            share = take_next_share(job)
            if share >= numbers[1]:
                return
            for _ in range(1000):  # long enough for others to come
                numbers[JOB + share] += share * share + numbers[2]

    return square


def squares(squaring: CompiledJob, number: int) -> bool:
    job = run_job_shares(squaring, (number,), SHARES, 1)
    return list(job[JOB:]) == [1000 * (share * share + number) for share in range(SHARES)]


def test_each_share_is_done_once(squaring: CompiledJob) -> None:
    assert all(squares(squaring, number) for number in range(200))


def test_with_fewer_threads_than_shares_and_with_one(squaring: CompiledJob) -> None:
    torch.set_num_threads(1)
    assert squares(squaring, 3)


def test_many_may_share_out_at_once(squaring: CompiledJob) -> None:
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda number: squares(squaring, number), range(100)))


def test_torch_goes_on_as_before(squaring: CompiledJob) -> None:
    x = torch.randn(1 << 20)
    want = x.exp()
    for number in range(20):
        assert squares(squaring, number)
        assert torch.equal(x.exp(), want)


def test_in_a_forked_process(squaring: CompiledJob) -> None:
    """Which has inherited OpenMP's threads by name only."""
    recipe, x = parse_recipe("mxfp8"), torch.randn(1 << 20).bfloat16()
    assert squares(squaring, 1)
    counted = count_histogram(x)
    want = quantization_sums(x, recipe.scaling, "input", E4M3, counted).sum_error2.item()
    context = multiprocessing.get_context("fork")
    found: SimpleQueue[tuple[bool, float]] = context.SimpleQueue()

    def in_child() -> None:
        found.put((squares(squaring, 2), quantization_sums(x, recipe.scaling, "input", E4M3, counted).sum_error2.item()))

    child = context.Process(target=in_child)
    child.start()
    child.join(GUARD)
    finished = child.exitcode
    child.kill()
    assert finished == 0
    assert found.get() == (True, want)
