"""A conftest.py that splits tests into groups, with the options of pytest-split."""

SPLIT = """
def pytest_addoption(parser):
    # The options of pytest-split, which shares the tests out by their times.
    parser.addoption("--splits", type=int)
    parser.addoption("--group", type=int)


def pytest_collection_modifyitems(config, items):
    number, group = config.getoption("splits"), config.getoption("group")
    if number:
        kept = [item for index, item in enumerate(items) if index % number == group - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
"""
