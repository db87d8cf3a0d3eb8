"""How many faults and inputs the tests marked `faults` try: `make test-faults` raises it."""

import os

FAULTS = int(os.environ.get("TICO_FAULTS", "1"))
