"""How fast is each kernel, as a share of what the device can do, beside the alternatives?"""
