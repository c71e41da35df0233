// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrOtherOwner is wrapped by errors about a dataDir that is not the node's, or a
// chain whose comment names another one. Such a chain is no drift: with two
// dataDirs each would undo what the other did.
var ErrOtherDataDir = errors.New("this node has another dataDir")

// ErrNewer is wrapped by errors about documents or rules that a newer version
// of this program wrote. They are left as they are.
var ErrNewer = errors.New("written by a newer version of ip-masq")

// DriftError is a difference that is there after rules were made sure of, or
// that was found where nothing may be written.
type DriftError struct{ Diff policy.Diff }

// Error lists the difference, rule by rule.
func (e *DriftError) Error() string {
	const most = 50
	return "rules differ from what is desired:\n" + e.Diff.Summary(most)
}

func otherOwner(c netfilter.OwnedChain, us policy.Owner) error {
	return fmt.Errorf("chain %s (%s) in %s: %w: the chain belongs to %s and not to %s; a node has one dataDir: "+
		"use that one everywhere, or run ip-masq-reconciler cleanup with --data-dir %s first",
		c.Name, c.Family, c.Choice, ErrOtherDataDir, policy.Quote(c.Owner.DataDir), policy.Quote(us.DataDir), policy.Quote(c.Owner.DataDir))
}

func newerRules(c *policy.Chain) error {
	return fmt.Errorf("chain %s (%s): %w: its rules have form %d and this program knows forms up to %d; "+
		"install the version that wrote them, or run its ip-masq-reconciler cleanup",
		c.Name, c.Family, ErrNewer, c.Owner.Schema, policy.RulesSchema)
}
