# Autocast, the gradient scaler and the precisions against torch.amp, to the bit.
lockstep_rank_program(lockstep_amp_parity amp_parity.cpp amp autograd parallel models data)
lockstep_script_test(interop.amp_parity FILE test_amp_parity.py LABEL interop TIMEOUT 300)
