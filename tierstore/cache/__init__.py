"""The host cache: executes what the native residency core decides, through the ticket engine."""

from tierstore.cache.config import CacheConfig, Scope
from tierstore.cache.host_cache import Backing, HostCache

__all__ = ["Backing", "CacheConfig", "HostCache", "Scope"]
