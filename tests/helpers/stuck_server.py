"""Server in which tokenizing "stuck" hangs, to simulate a fault in a compiled library.

"stuck" is work in Python; "stuck in C" keeps the interpreter's lock, so that no Python code runs.
"""

import ctypes
import sys
import threading

from nbflow.cli import main
from nbflow.tokenization import Tokenizer

prompt_ids = Tokenizer.prompt_ids


def stuck(self, text, *args, **options):
    if text == "stuck":
        print("stuck", file=sys.stderr, flush=True)
        threading.Event().wait()
    if text == "stuck in C":
        print("stuck", file=sys.stderr, flush=True)
        ctypes.PyDLL(None).pause()
        while True:  # a signal ends pause(); nothing ends this
            ctypes.PyDLL(None).sleep(1000)
    return prompt_ids(self, text, *args, **options)


Tokenizer.prompt_ids = stuck
main(["serve", *sys.argv[1:]])
