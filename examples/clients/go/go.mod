module ackwheel

go 1.19
