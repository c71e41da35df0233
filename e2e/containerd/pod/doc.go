// SPDX-License-Identifier: Apache-2.0

// Command pod is what containers of the tests run: it waits, sends, answers, and
// says which address the other side saw. It speaks what the hosts of a topology
// speak: each peer answers "NAME SOURCE", in one line.
//
//	pod                              waits: a sandbox
//	pod ask PROTOCOL ADDR:PORT...    sends once to each, as soon as it runs, and waits
//	pod load INTERVAL ADDR:PORT...   sends UDP to each in turn, always from a new port
//	pod serve PORT                   answers, UDP and TCP
//
// ask and load print a line per destination: its address, then the answer or, after
// two seconds, "-" and what went wrong. load begins it with the time of sending, in
// RFC 3339. Nothing is sent twice. Its invariant: a line tells of one packet or
// connection, and was read from the answer to that.
package main
