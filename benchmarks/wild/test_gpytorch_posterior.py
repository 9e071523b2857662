"""gpytorch 1.15.2 computes the covariance of all test points, where the mean is asked for."""

import pytest
import torch

PACKAGE = "gpytorch"
GOOD = "1.14"
BAD = "1.15.2"
RELEASE = "1.15.2"
WITH = ("numpy",)
REPORTED = "out of memory: 27 TB asked for"
LINKS = ("cornellius-gp/gpytorch#2754",)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_mean_of_8000_points():
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, inputs, targets, likelihood):
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(
                self.mean(inputs), self.covariance(inputs)
            )

    likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
    inputs = torch.randn(3, 818, 16, device="cuda")
    model = Model(inputs, torch.randn(3, 818, device="cuda"), likelihood).cuda().eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances(state=True):
        mean = model(torch.randn(3, 8000, 16, device="cuda")).mean
    assert mean.shape == (3, 8000)
