// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"errors"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// propose puts the network's statement among the documents.
func (n *node) propose(s store.State, own policy.Source) (*enforce.Proposal, error) {
	p := enforce.NewProposal(s.Sources)
	return p, p.Add(own, n.disk, n.Warn)
}

// conflists is the conf directory of the runtimes, read when first asked for:
// an ADD whose document stands does without it.
type conflists struct {
	dir  string
	warn func(error)
	read *config.ConfDir
	err  error
}

func (c *conflists) load() config.ConfDir {
	if c.read == nil {
		dir, err := config.ReadConfDir(c.dir)
		if !errors.Is(err, os.ErrNotExist) {
			c.warn(err)
		}
		c.read, c.err = &dir, err
	}
	return *c.read
}

// Names implements enforce.Conflists.
func (c *conflists) HasEntry(network string) bool { return c.load().HasEntry(network) }

// Lacks implements enforce.Conflists.
func (c *conflists) LacksEntry(network string) bool { return c.load().LacksEntry(network) }

// Has implements enforce.Conflists.
func (c *conflists) HasEntryWith(network string, s policy.SourcePolicy) bool {
	return c.load().HasEntryWith(network, s)
}
