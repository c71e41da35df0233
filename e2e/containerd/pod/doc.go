// SPDX-License-Identifier: Apache-2.0

// Command pod is the program of containers in tests: it waits, sends, answers, and prints the
// source address that the receiver saw. It uses the protocol of the hosts of a topology: each peer
// answers with a line "NAME SOURCE".
//
//	pod                              waits: a sandbox
//	pod ask PROTOCOL ADDR:PORT...    sends once to each, as soon as it runs, and waits
//	pod load INTERVAL ADDR:PORT...   sends UDP to each in turn, always from a new port
//	pod serve PORT                   answers, UDP and TCP
//
// ask and load print a line for each packet or connection: the destination, then its answer or,
// after two seconds, "-" and the error. load prints the time of sending first, in RFC 3339. Nothing
// is sent twice.
package main
