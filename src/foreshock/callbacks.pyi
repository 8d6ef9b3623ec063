from foreshock.monitor.callbacks.accelerate import ForeshockTracker as AccelerateTracker
from foreshock.monitor.callbacks.huggingface import ForeshockCallback as TransformersCallback
from foreshock.monitor.callbacks.lightning import ForeshockCallback as LightningCallback
from foreshock.monitor.callbacks.torchtitan import watch as watch_torchtitan

__all__ = ["AccelerateTracker", "LightningCallback", "TransformersCallback", "watch_torchtitan"]
