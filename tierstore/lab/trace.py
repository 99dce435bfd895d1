class RecordingResidency:
    def close(self): pass
