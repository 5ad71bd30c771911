"""What a guarded run left behind, collected and written as one HTML page or a section of a model card."""
