"""Offers a stand-in for torchvision, which SGLang's scheduler imports and nothing here uses, to `import` alone: whoever asks
importlib whether it is installed, as transformers does, still hears no."""

import importlib.machinery
import sys
from pathlib import Path

_STAND_INS = str(Path(__file__).resolve().parent / "stand_ins")


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") == "importlib.util":
                return None
            frame = frame.f_back
        asked = sys.modules.get("transformers.utils.import_utils")
        if asked is not None:  # it remembers its first answer
            asked.is_torchvision_available()
            if hasattr(asked, "is_torchvision_v2_available"):
                asked.is_torchvision_v2_available()
        return importlib.machinery.PathFinder.find_spec(name, [_STAND_INS])


sys.meta_path.append(_Finder)
