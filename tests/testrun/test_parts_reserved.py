"""What a part has reserved: the allocator keeps what the code before the part took."""

from helpers.marked_sessions import one_test

EARLIER = ["with gpu_memory.measure('first'):", "    x = [mib(100) for _ in range(6)]; del x"]


def test_a_part_that_took_nothing_is_told_whose_memory_its_limit_met(suite):
    body = [*EARLIER, "with gpu_memory.measure('second', max_gib=0.25):", "    mib(50)"]
    session = one_test(suite, *body, fixtures="gpu_memory", mark="baseline=False")
    assert session.outcomes == {"failed": 1}
    assert "the allocator held 600.00 MiB already when the part began" in session.flat
    assert "fragmented" not in session.flat


def test_a_part_that_takes_memory_is_told_nothing_of_that(suite):
    body = [*EARLIER, "with gpu_memory.measure('second', max_allocated_gib=0.25):", "    mib(700)"]
    session = one_test(suite, *body, fixtures="gpu_memory", mark="baseline=False")
    assert session.outcomes == {"failed": 1}
    assert "already when the part began" not in session.flat
