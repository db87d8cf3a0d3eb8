"""What is done to the images: a policy as data, pixel operations, one batched executor for CPU and GPU."""

from tico_ssl.views.executor import Views
from tico_ssl.views.policy import ViewPolicy
