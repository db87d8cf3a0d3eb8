"""Object detection and instance segmentation on top of a pretrained backbone.

From top to bottom: `pictures` (content of a COCO or VOC folder), `samples` (input of the network, loaded `ahead`),
`network`, `heads` and `boxes` (Faster and Mask R-CNN from torchvision's parts, batched), `training`, `predicting`,
`scoring`, `drawing`, and `protocol`, the only module that the two evaluations call.
"""
