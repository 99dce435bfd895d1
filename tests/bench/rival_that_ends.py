"""A rival's process that ends without an answer, and leaves a line in its log."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    request = json.loads(sys.stdin.readline())
    Path(request["directory"], "log").write_text("begun\nthe end\n\n")
    sys.exit(7)
