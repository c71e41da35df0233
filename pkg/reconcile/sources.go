// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/document/yamldoc"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// Sources is what stands in files on the node: the administrators' guard, the
// conflists, and the agents' files.
type Sources struct {
	Guard   config.PluginFile
	ConfDir config.ConfDir
	// Agent is nil where the agent files are no source.
	Agent *config.AgentFiles

	// Why one of them could not be read.
	GuardErr, ConfDirErr, AgentErr error

	// owned are the chains in the kernel that name an owner, read when first needed.
	owned *[]netfilter.OwnedChain
}

func (s *Sources) ownedBy(ctx context.Context, drivers netfilter.Drivers) ([]netfilter.OwnedChain, error) {
	if s.owned == nil {
		owned, err := drivers.Owned(ctx)
		if err != nil {
			return owned, err
		}
		s.owned = &owned
	}
	return *s.owned, nil
}

// Read reads the sources. What is wrong with one of them is in there.
func (n *Node) Read() *Sources {
	s := n.again(&Sources{})
	if own, isSource := n.Settings.AgentSource(); isSource {
		files, err := config.ReadAgentFiles(yamldoc.Decode, n.Settings.AgentConfigDir, n.Settings.AgentDialect, own)
		s.Agent, s.AgentErr = &files, err
	}
	return s
}

// again reads anew what the plugin reads too. The agents' files stay as they
// were read: somebody may be writing one at this moment, of which the loop will
// hear.
func (n *Node) again(before *Sources) *Sources {
	s := Sources{Agent: before.Agent, AgentErr: before.AgentErr, owned: before.owned}
	s.Guard, s.GuardErr = config.ReadPluginFile(n.PluginFile)
	s.ConfDir, s.ConfDirErr = config.ReadConfDir(n.Settings.CNIConfDir)
	return &s
}

// Interval returns how long the node may go without a pass: what the settings
// say, unless the agents' files say something.
func (n *Node) Interval(s *Sources) time.Duration {
	if s != nil && s.Agent != nil && s.AgentErr == nil && s.Agent.ResyncInterval > 0 {
		return s.Agent.ResyncInterval
	}
	return n.Settings.ResyncInterval
}
