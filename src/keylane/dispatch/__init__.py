"""Runs handlers on messages in lanes: the dispatcher that groups and Marshal share."""

from keylane.dispatch.dispatcher import Dispatcher, HandlerSlots, Policy, Settling, store_dead_letter
from keylane.dispatch.error_text import error_line, traceback_text
from keylane.dispatch.handler_call import Executor, HandlerCall, ThreadPool, check_executor, is_coroutine_function

__all__ = [
    "Dispatcher",
    "Executor",
    "HandlerCall",
    "HandlerSlots",
    "Policy",
    "Settling",
    "ThreadPool",
    "check_executor",
    "error_line",
    "is_coroutine_function",
    "store_dead_letter",
    "traceback_text",
]
