"""Object detection and instance segmentation on top of a pretrained backbone.

From top to bottom: `pictures` (what a COCO or VOC folder holds), `samples` (what the network is fed, made `ahead`),
`network`, `heads` and `boxes` (Faster and Mask R-CNN from torchvision's parts, for whole batches), `training`,
`predicting`, `scoring`, `drawing`, and `protocol`, which is all that the two evaluations call.
"""
