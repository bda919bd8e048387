"""``python -m xlite_runner`` is ``xlite-runner``."""

import sys

from xlite_runner.cli import main

sys.exit(main())
