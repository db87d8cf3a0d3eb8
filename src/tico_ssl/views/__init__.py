"""What is done to the images: pixel operations, and one batched executor for CPU and GPU."""
