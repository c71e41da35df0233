// SPDX-License-Identifier: Apache-2.0

// Package timelimit scales the limits on time that tests assert to the machine that
// runs them. A limit is that of an idle machine; where it is exceeded, the machine
// is measured at that moment, and the limit is so many times longer. On an idle
// machine nothing is scaled, so a regression fails there.
//
// Only tests may import it, and what starts them.
package timelimit
