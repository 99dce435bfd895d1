"""Forward passes of served models over tokens that follow what a cache of keys and values holds."""
