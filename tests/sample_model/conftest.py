"""Make this folder importable as ``sample_model``: in pytest's importlib mode tests cannot see neighbours."""

import sys
import types
from pathlib import Path

package = types.ModuleType("sample_model")
package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("sample_model", package)
