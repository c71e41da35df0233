// SPDX-License-Identifier: Apache-2.0

// Package timelimit scales the time limits of tests to the load of the machine. A limit is that of
// an idle machine; if it is exceeded, the package measures the machine at that moment and
// multiplies the limit by the result. On an idle machine nothing is scaled, so a regression fails
// there. Only tests and the programs that start them may import it.
package timelimit
