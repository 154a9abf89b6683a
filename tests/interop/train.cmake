lockstep_script_test(interop.train_parity FILE test_train_parity.py LABEL interop TIMEOUT 600 COST 50)
