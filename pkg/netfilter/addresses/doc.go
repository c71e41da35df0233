// SPDX-License-Identifier: Apache-2.0

// Package addresses reads the addresses of the node, of which outputAddresses chooses some. It changes nothing. The
// plugin reads them in each ADD that the key concerns; the reconciler when they change, too.
package addresses
