"""cuDNN's state of dropout, which PyTorch keeps for a process: each test makes its own."""

from pytest_gpumem.meter.dropout_state import KEPT
from pytest_gpumem.report.json_report import read_report

SUITE = """
    from torch import nn

    def run(network, rate):
        layers = network(64, 64, 2, dropout=rate, device="cuda")
        layers(torch.zeros(8, 4, 64, device="cuda"))[0].sum().backward()

    @pytest.mark.gpu_memory
    def test_none():
        run(nn.LSTM, 0.0)

    @pytest.mark.gpu_memory
    def test_first():
        run(nn.LSTM, 0.5)

    @pytest.mark.gpu_memory
    def test_inference():
        with torch.inference_mode():
            nn.LSTM(64, 64, 2, dropout=0.5, device="cuda")(torch.zeros(8, 4, 64, device="cuda"))

    @pytest.mark.gpu_memory
    def test_later():
        run(nn.LSTM, 0.5)

    @pytest.mark.gpu_memory
    def test_twice():
        run(nn.LSTM, 0.5)
        run(nn.LSTM, 0.1)
"""
STATE = 132 * 2**15
"""bytes of the state on an H100: 32 KiB a multiprocessor"""


def measured(suite, source, *args):
    """The measurement of each test of a suite that passes, by the test's name.

    PyTorch keeps the state: the process ends with it.
    """
    session = suite.run_warm("--gpumem-json=r.json", *args, source=source)
    assert session.ret == 0
    results = read_report(suite.path / "r.json").results
    return {result.nodeid.partition("::")[2]: result.measurement for result in results}


def figures(measurement):
    return *measurement.peaks, *measurement.retained


def test_each_test_has_the_figures_that_it_has_alone(suite):
    tests = measured(suite, SUITE)
    none, first, inference, later, twice = map(figures, tests.values())
    assert first == later == twice
    assert inference[1] == first[1]
    assert first[0].allocated - none[0].allocated == STATE  # the peak
    assert first[1].allocated - none[1].allocated == STATE  # left behind
    alone = measured(suite, SUITE, "test_it.py::test_later")
    assert figures(alone["test_later"]) == first


def test_the_state_of_a_fixture_is_the_fixtures(suite):
    tests = measured(
        suite,
        """
    @pytest.fixture(scope="module")
    def layers():
        layers = torch.nn.GRU(64, 64, 2, dropout=0.5, device="cuda")
        layers(torch.zeros(8, 4, 64, device="cuda"))
        return layers

    @pytest.mark.gpu_memory
    def test_one(layers):
        layers(torch.zeros(8, 4, 64, device="cuda"))

    @pytest.mark.gpu_memory
    def test_other(layers):
        layers(torch.zeros(8, 4, 64, device="cuda"))
    """,
    )
    assert tests["test_one"].peaks == tests["test_other"].peaks
    assert STATE < tests["test_one"].peaks[0].allocated < 2 * STATE


def test_a_state_that_a_live_graph_may_use_stays(suite):
    tests = measured(
        suite,
        """
    layers = torch.nn.RNN(64, 64, 2, dropout=0.5)
    x = torch.zeros(8, 4, 64)

    @pytest.fixture(scope="session")
    def graphed():
        return torch.cuda.make_graphed_callables(layers.cuda(), (x.cuda(),))

    @pytest.mark.gpu_memory
    def test_graph(graphed):
        graphed(x.cuda())

    @pytest.mark.gpu_memory
    def test_another():
        torch.nn.RNN(64, 64, 2, dropout=0.5, device="cuda")(x.cuda())
    """,
    )
    assert tests["test_graph"].peaks[0].allocated > STATE > tests["test_another"].peaks[0].allocated
    assert KEPT in tests["test_another"].notes
    assert KEPT not in tests["test_graph"].notes


def test_torch_script_compiles_the_networks(suite):
    source = """
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.LSTM(64, 64, 2, dropout=0.5)

        def forward(self, x):
            return self.layers(x)[0]

    @pytest.mark.gpu_memory
    def test_scripted():
        model = torch.jit.script(Model()).cuda()
        assert model(torch.zeros(8, 4, 64, device="cuda")).shape == (8, 4, 64)
    """
    assert measured(suite, source)


def test_warnings_of_the_networks_are_torchs(suite):
    source = """
    @pytest.mark.gpu_memory
    @pytest.mark.filterwarnings("error", "ignore:::torch.nn.modules.rnn")
    def test_projected():
        torch.nn.LSTM(4, 4, proj_size=2)(torch.zeros(2, 2, 4))  # oneDNN has no projections
        torch.empty(1, device="cuda")
    """
    assert measured(suite, source)
