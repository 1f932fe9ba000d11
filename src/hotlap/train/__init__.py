"""One time-boxed slice of one run. Only child processes import this package: it needs torch.

Importing it sets, before torch or a hub client is loaded, that nothing is fetched (what was not prefetched is missing)
and that OpenMP's waiting threads sleep. By default they spin, which on a machine that does anything else besides costs
half the speed (`docs/log.md`, 2026-11-30). And bitsandbytes, which PEFT imports with itself, does not recommend a
package that would fetch its kernels.
"""

import logging
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
