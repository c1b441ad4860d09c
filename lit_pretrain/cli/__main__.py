"""``python -m lit_pretrain.cli``: the same as the console script."""

import sys

from lit_pretrain.cli import main

sys.exit(main())
