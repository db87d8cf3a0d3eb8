"""What the fused blocks of a ResNet (BatchNorm, sum and ReLU in one operation, and the stem) save of a captured step.

They are compared with torch's modules as they are and with cuDNN's BatchNorm, which torch does not choose in bf16. All
forms have channels-last memory, and views are included.

    python benchmarks/fused.py [KEY=VALUE ...] [--recipes cifar10/tico ...] [--seconds 4]
"""

import torch
from steps import Form, main
from torch import Tensor, nn


class CudnnBatchNorm2d(nn.BatchNorm2d):
    """In training, cuDNN's whatever torch would choose."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalised by the statistics of the batch."""
        if not self.training or self.num_batches_tracked is None:
            return super().forward(input)
        self.num_batches_tracked.add_(1)
        averages = self.running_mean, self.running_var
        output: Tensor = torch.cudnn_batch_norm(
            input, self.weight, self.bias, *averages, True, self.momentum or 0.1, self.eps
        )[0]
        return output


def use_cudnn(method: nn.Module) -> None:
    """Exchange every BatchNorm of images, in place."""
    for module in method.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = CudnnBatchNorm2d


if __name__ == "__main__":
    main(
        __doc__,
        {"cifar10/tico": {"training.batch_size": 512}, "imagenet/tico": {"training.batch_size": 256}},
        {"fused": Form(), "torch": Form(fused=False), "cudnn": Form(fused=False, change=use_cudnn)},
    )
