// SPDX-License-Identifier: Apache-2.0

// Package netfilter is the port to the kernel's packet filter: what a backend
// has to be able to do, and the choice of the backend that a node's chains are
// kept in. The backends themselves are the packages below it; they import this
// one for the port's types, and only a main package knows them all.
package netfilter
