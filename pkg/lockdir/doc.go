// SPDX-License-Identifier: Apache-2.0

// Package lockdir reads and writes files in directories of others: those from which
// runtimes load configurations and run plugins.
//
// Its invariant: who has a Dir is the only one of us that writes there, and what
// temporary files of ours are in it have been left by somebody who was killed, and
// are gone. Their names are such that no runtime loads or runs one.
//
// Of this module it imports policy alone, for messages. conflist, install and
// doctor may import it.
package lockdir
