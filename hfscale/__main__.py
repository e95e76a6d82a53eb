"""`python -m hfscale` is `hfscale`."""

import sys

from hfscale.cli import main

sys.exit(main())
