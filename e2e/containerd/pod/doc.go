// SPDX-License-Identifier: Apache-2.0

// Command pod is the program of containers in tests: it waits, sends, answers, and prints the
// source address that the receiver saw. It uses the protocol of the hosts of a topology: each peer
// answers with a line "NAME SOURCE".
//
//	pod                         waits: a sandbox
//	pod serve PORT NAME         answers, UDP over IPv4 and TCP
//	pod ask FLOW...             sends once to each
//	pod first FLOW...           the same as soon as it runs, and then waits: the network of a container stays
//	pod load INTERVAL FLOW...   sends to each in turn, always from a new port
//	pod stream FLOW...          sends UDP packets with the sender's address to each in turn, without answers
//
// A FLOW is udp:ADDR:PORT or tcp:ADDR:PORT. ask, first and load print a line for each: the flow, then its
// answer or, after two seconds, "-" and the error. load prints the time of sending first, in RFC 3339.
// Nothing is sent twice.
package main
