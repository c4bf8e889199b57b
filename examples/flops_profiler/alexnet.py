"""Profile AlexNet (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014).

python examples/flops_profiler/alexnet.py --batch-size 16
"""

from __future__ import annotations

import argparse

from torch import Tensor, nn

from deepspeed.profiling.flops_profiler import get_model_profile


class AlexNet(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(images)).flatten(1))


def main(arguments: list[str] | None = None) -> tuple[str, str, str]:
    parser = argparse.ArgumentParser(description="Profile AlexNet.")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--output-file", help="default: standard output")
    given = parser.parse_args(arguments)
    flops, macs, params = get_model_profile(
        model=AlexNet(),
        input_shape=(given.batch_size, 3, 224, 224),
        args=None,
        kwargs=None,
        print_profile=True,
        detailed=True,
        module_depth=-1,
        top_modules=1,
        warm_up=given.warm_up,
        as_string=True,
        output_file=given.output_file,
        ignore_modules=None,
    )
    print(f"{flops}, {macs}, {params} parameters")
    return flops, macs, params


if __name__ == "__main__":
    main()
