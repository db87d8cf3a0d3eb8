"""Time that fused ResNet blocks (BatchNorm, sum and ReLU in one operation, and the stem) save per captured step.

They are compared with torch's own modules. Both forms are channels-last, and views are included.

    python benchmarks/fused.py [KEY=VALUE ...] [--recipes cifar10/tico ...] [--seconds 4]
"""

from steps import Form, main

if __name__ == "__main__":
    main(
        __doc__,
        {"cifar10/tico": {"training.batch_size": 512}, "imagenet/tico": {"training.batch_size": 256}},
        {"fused": Form(), "torch": Form(fused=False)},
    )
