"""crc32c by its definition."""


def naive_crc32c(data: bytes, crc: int = 0) -> int:
    """One bit at a time: reflected polynomial 0x82F63B78, inverted at both ends."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
