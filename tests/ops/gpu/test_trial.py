"""The first small kernel on a GPU."""

from __future__ import annotations

from unittest import mock

import torch

from tests.ops.gpu.triton_kit import built, compiling, interpreted


@interpreted
def test_the_trial_passes_where_kernels_work_and_says_why_not() -> None:
    from deepspeed.ops.gpu import trial

    with mock.patch("torch.cuda.device_of"):
        assert trial.passes(torch.device("cpu"))
        with (
            mock.patch.object(trial.logger, "warning") as warning,
            mock.patch.object(trial, "_trial_kernel", {(1,): mock.Mock(side_effect=OSError("no driver"))}),
        ):
            assert not trial.passes(torch.device("cpu"))
        assert "OSError: no driver" in warning.call_args.args[0]
        with mock.patch.object(trial, "_trial_kernel", {(1,): lambda x, out, SIZE: None}):
            assert not trial.passes(torch.device("cpu"))


@compiling
def test_the_trial_compiles() -> None:
    from deepspeed.ops.gpu import trial

    with mock.patch("torch.cuda.device_of"):
        assert built(lambda: trial.passes(torch.device("cpu"))) == {"_trial_kernel"}
