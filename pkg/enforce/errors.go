// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrOtherOwner is wrapped by errors about a chain whose comment names another
// dataDir than ours. It is never drift: repairing it would start a war.
var ErrOtherOwner = errors.New("chain is kept from another dataDir")

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

func otherOwner(c *policy.Chain, us policy.Owner) error {
	return fmt.Errorf("chain %s (%s): %w: it is kept from %s and not from %s; a node has one dataDir: "+
		"use that one everywhere, or run ip-masq-reconciler cleanup with the other first",
		c.Name, c.Family, ErrOtherOwner, policy.Quote(c.Owner.DataDir), policy.Quote(us.DataDir))
}

func newerRules(c *policy.Chain) error {
	return fmt.Errorf("chain %s (%s): %w: its rules have form %d and this program knows forms up to %d; "+
		"install the version that wrote them, or run its ip-masq-reconciler cleanup",
		c.Name, c.Family, ErrNewer, c.Owner.Schema, policy.RulesSchema)
}
