// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// addition is what an ADD states, and what it found out about that.
type addition struct {
	conf      networkConf
	result    []byte // of the ADD: that of the plugin before, in the version of the configuration
	resultErr error
	onHost    bool // the plugin before made an interface of the host
	pod       store.Pod
	subnets   []netip.Prefix // of the pod, to be learned

	cache  store.VerificationCache // what an earlier ADD of the network verified
	digest string                  // of the entry, as VerificationCache.Entry; "" if there is none

	entry           *config.Entry // nil while it was not necessary to validate it
	dataDirIsTheOne bool          // it was asked whether the dataDir is the node's
}

// add records the attachment and ensures the rules. If all is right it writes nothing else.
func (n *node) add(ctx context.Context, args *skel.CmdArgs) error {
	a := n.addition(args)
	if err := n.admit(ctx, a); err != nil {
		return err
	}
	n.rememberEntry(a.conf)
	if err := n.Dir.Attach(a.pod); err != nil {
		return fmt.Errorf("record the pod: %w", &enforce.UnwritableError{Err: err})
	}
	resetLimit, err := n.ensure(ctx, a)
	if err != nil {
		return err
	}
	n.resetConnections(ctx, resetLimit)
	if !a.onHost {
		n.warnNoEffect()
	}
	_, err = n.plugin.Stdout.Write(a.result)
	return err
}

// addition parses what an ADD states, but for the entry: an earlier ADD may have found that valid.
func (n *node) addition(args *skel.CmdArgs) *addition {
	a := &addition{cache: n.Dir.VerificationCache(n.source()), conf: n.findNetconf()}
	var prevResult types.Result
	prevResult, a.result, a.resultErr = n.result()
	a.onHost = podinfo.HasHostInterface(prevResult)
	addresses := podinfo.Networks(prevResult, args.IfName)
	if count := len(addresses); count > podinfo.MaxAddresses {
		n.Warn(fmt.Errorf("the pod has %d addresses on %s; nonMasqueradeNamespaces is about %d of them",
			count, policy.Quote(args.IfName), podinfo.MaxAddresses))
	}
	if !n.pluginFile.Present {
		a.subnets = podSubnets(addresses)
	}
	a.pod = podOf(n.attachment(args), args.Args, addresses)
	if a.conf.stdinDiffers {
		a.pod.Addresses = nil // anybody may choose them
	}
	a.digest = n.digestOf(a.conf, a.subnets)
	return a
}

// admit returns why an ADD is refused before it leaves anything, not even its attachment.
func (n *node) admit(ctx context.Context, a *addition) error {
	if a.entryIsVerified() {
		return withCode(types.ErrInvalidNetworkConfig, a.resultErr)
	}
	entry, err := n.validEntry(a.conf)
	if err != nil {
		return err
	}
	a.entry = &entry
	// An ADD without a document is bound to write, also where the dataDir is not the node's.
	_, err = os.Lstat(n.Dir.DocumentPath(n.source()))
	if errors.Is(err, os.ErrNotExist) {
		if err := n.CheckDataDir(ctx); err != nil {
			return err
		}
		a.dataDirIsTheOne = true
	}
	return withCode(types.ErrInvalidNetworkConfig, a.resultErr)
}

// ensure makes the entry the network's document and syncs the rules. It reads the documents after the
// attachment was recorded: a reconciler that drops the network has either done so by now, or finds the
// attachment. It returns how long connections are to be reset.
func (n *node) ensure(ctx context.Context, a *addition) (resetLimit time.Duration, err error) {
	reading, err := n.Dir.Read()
	if err != nil {
		return 0, err
	}
	if n.isVerified(a, reading) {
		return 0, nil
	}
	own, err := n.ownSource(a, reading)
	if err != nil {
		return 0, err
	}
	if !n.isStored(reading.State(), own) {
		return n.change(ctx, a, reading, own)
	}
	observed, cache := n.observe(ctx, reading)
	if !n.isInForce(observed) {
		return n.change(ctx, a, reading, own)
	}
	cache.Entry = a.digest
	if cache.Inputs != "" && cache.Entry != "" {
		_ = n.Dir.PutVerificationCache(n.source(), cache) // or the next ADD reads the rules, too
	}
	n.warnInactive(observed)
	return n.resetLimit(observed, a.pod.Addresses, false), observed.OverLimit(a.pod.Addresses)
}

// ownSource returns what the network's document is to be. Its policy is that of the stored one if the entry
// was verified with the files: to validate a long entry again would take longer than to read the rules.
func (n *node) ownSource(a *addition, reading *store.Reading) (policy.Source, error) {
	state := reading.State()
	stored := state.Find(n.source())
	if stored != nil && a.entryIsVerified() && n.hasInputs(a.cache, reading) {
		return n.sourceWith(stored.Policy, a.subnets), nil
	}
	if a.entry == nil {
		entry, err := n.validEntry(a.conf)
		if err != nil {
			return policy.Source{}, err
		}
		a.entry = &entry
	}
	return n.sourceWith(a.entry.Policy, a.subnets), n.checkAgentConfig(*a.entry, state)
}

func (n *node) sourceWith(p policy.SourcePolicy, subnets []netip.Prefix) policy.Source {
	return policy.Source{ID: n.source(), Policy: p, PodSubnets: subnets, ConfDir: n.pluginFile.PolicyDir()}
}

// checkAgentConfig returns that an entry requires a policy of the agent files, and none is stored.
func (n *node) checkAgentConfig(entry config.Entry, state store.State) error {
	agent := policy.SourceID{Kind: policy.AgentFiles}
	if !entry.RequireAgentConfig || n.Dir.HasDocument(state, agent) {
		return nil
	}
	err := errors.New("requireAgentConfig: no policy of the agent files is stored yet; " +
		"start ip-masq-reconciler with an agent_config_dir, or remove the key")
	return withCode(types.ErrTryAgainLater, err)
}

// isStored reports whether the documents can be read, and have the network's policy and the pod's subnets.
func (n *node) isStored(state store.State, own policy.Source) bool {
	stored := state.Find(own.ID)
	if stored == nil || stored.Superseded || len(n.Dir.Lost(state, own.ID)) > 0 {
		return false
	}
	if !stored.Policy.Equal(own.Policy) || own.ConfDir != "" && own.ConfDir != stored.ConfDir {
		return false
	}
	with := *stored
	isNew, err := with.AddPodSubnets(own.PodSubnets...)
	n.Warn(err)
	return !isNew
}

// isInForce reports whether the rules are those that the documents ask for, and the network's is one of them.
func (n *node) isInForce(observed *enforce.State) bool {
	return observed.InSync() && !n.loses(observed)
}

// loses reports whether the network's document is not in force because of a conflict.
func (n *node) loses(s *enforce.State) bool {
	for _, p := range s.Policies() {
		for _, c := range p.Conflicts {
			if c.Superseded.Source == n.source() {
				return true
			}
		}
	}
	return false
}

// change makes a policy that of the network, and syncs the rules, with the lock held.
func (n *node) change(
	ctx context.Context, a *addition, reading *store.Reading, own policy.Source,
) (resetLimit time.Duration, err error) {
	if !a.dataDirIsTheOne {
		if err := n.CheckDataDir(ctx); err != nil {
			return 0, err
		}
	}
	lock, err := n.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { n.Warn(lock.Release()) }()
	reading, err = n.Dir.ReadAgain(reading)
	if err != nil {
		return 0, err
	}
	s, err := n.apply(ctx, lock, reading.State(), own, a.pod.Addresses)
	n.Warn(lock.Tidy())
	if s == nil || err != nil {
		return 0, err
	}
	return n.resetLimit(s, a.pod.Addresses, true), nil
}

// apply applies a proposal with this policy for the network. The state is nil if its chain stays as it is.
func (n *node) apply(
	ctx context.Context, lock *store.Lock, state store.State, own policy.Source, addresses []netip.Addr,
) (*enforce.State, error) {
	p, err := n.propose(ctx, state, own)
	if p == nil || err != nil {
		return nil, err
	}
	chain := p.Chain(own.ID)
	s, err := n.Apply(ctx, lock, state, p)
	if errors.Is(err, store.ErrNewer) && s.Exists(chain) { // the rules of the newer version stay in force
		n.Warn(err)
		return s, nil
	}
	if err != nil {
		return s, err
	}
	if err := s.OverLimit(addresses); err != nil {
		return s, err
	}
	return s, n.chainErr(s, chain)
}

// propose returns the proposal with this policy for the network. It returns nil if a document cannot be
// read, or the record is of a newer version, and the network has a document and its chain: then the ADD
// passes, and its entry is not stored. Rules that are computed without a document would masquerade traffic
// that it exempts.
func (n *node) propose(
	ctx context.Context, state store.State, own policy.Source,
) (*enforce.Proposal, error) {
	n.warnUnreadable(state)
	p := &enforce.Proposal{Sources: state.Sources, Lost: n.Dir.Lost(state, own.ID)}
	// Most ADDs do not need the conflists. They are read with the lock held, as they may change while it is
	// waited for.
	conflists := sync.OnceValue(func() enforce.Conflists {
		confs, _ := n.readConfDir()
		return confs
	})
	if err := p.Add(own, conflists, n.Warn); err != nil {
		return nil, err
	}
	isKept := len(p.Lost) > 0 && state.Find(own.ID) != nil
	if isKept && n.ObserveProposal(ctx, p, state.Record).Exists(p.Chain(own.ID)) {
		return nil, nil
	}
	return p, nil
}

// chainErr returns what is wrong with the network's own chain. What is wrong with others is a
// warning.
func (n *node) chainErr(s *enforce.State, chain string) error {
	for _, w := range append(s.LinearChains(), s.WithoutRandomPorts()...) {
		n.Warn(w)
	}
	n.warnInactive(s)
	for _, p := range s.Policies() {
		for _, e := range p.Conflicts.Summary() {
			n.Warn(e)
		}
		if p.Chain != chain {
			n.Warn(s.Err(p.Chain))
		}
	}
	return n.errUnlessNewer(s, chain)
}

func (n *node) warnInactive(s *enforce.State) {
	for _, i := range s.Guard.Inactive {
		n.Warn(i)
	}
	for _, e := range s.NoOutputs() {
		n.Warn(e)
	}
}
