"""One time-boxed slice of one run. Only child processes import this package: it needs torch.

Importing it sets, before torch or a hub client is loaded, that nothing is fetched (what was not prefetched is missing)
and how OpenMP's idle threads wait. And bitsandbytes, which PEFT imports with itself, does not recommend a package that
would fetch its kernels.
"""

import logging
import os

from hotlap.child import with_waiting_threads

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ |= with_waiting_threads(os.environ)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
