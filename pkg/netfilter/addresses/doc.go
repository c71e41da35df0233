// SPDX-License-Identifier: Apache-2.0

// Package addresses reads the addresses of the node, from which outputAddresses chooses. It changes nothing.
// The plugin reads them in each ADD that the key concerns. The reconciler also reads them when they change.
// Addresses of Services are left out before they are decoded, as there can be thousands.
package addresses
