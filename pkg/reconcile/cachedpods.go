// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// cachedPods records pods that started before the plugin entry was in the conflist, from the files of the
// runtime's cache.
type cachedPods struct {
	networks []string                    // that have a plugin entry
	seen     map[string]time.Time        // the files that were decided about, with their times
	recorded map[string]store.Attachment // those that have a record
	isRead   bool                        // recorded has all records that were on disk
	fresh    bool                        // some may not be in the rules yet
}

// cacheSync is the result of a sync of the records with the runtime's cache.
type cacheSync struct {
	// unwritten tells that the rules may be without these records: some changed, or a process before may have
	// been killed between a record and its rules.
	unwritten  bool
	unrecorded []UnrecordedPod // that could not be recorded
	warnings   []error
}

// UnrecordedPod is a pod of the runtime's cache without a record, so that it is in no namespace.
type UnrecordedPod struct {
	File   string `json:"file"`             // in the cache
	Reason string `json:"reason"`           // the same for all pods of one cause
	Detail string `json:"detail,omitempty"` // of this pod
}

// CacheEvents tells which events of the runtime's cache concern syncs. It is for one goroutine.
type CacheEvents struct {
	node   *Node
	before map[string]time.Time // the files without an ADD of the plugin
	added  map[string]time.Time // those with one
}

// CacheEvents returns the events of the node's cache, none of which has been told.
func (n *Node) CacheEvents() *CacheEvents {
	return &CacheEvents{node: n, before: map[string]time.Time{}, added: map[string]time.Time{}}
}

// Concern reports whether a sync may have pods of the cache to record or to forget since the last call: files
// came, went or changed whose attachments had no ADD of the plugin.
func (c *CacheEvents) Concern() bool {
	files, err := podinfo.CacheFiles(c.node.CacheDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if err != nil {
		return true // the sync reports it
	}
	others := map[string]time.Time{}
	for file, written := range files {
		switch {
		case c.added[file].Equal(written):
		case !c.before[file].Equal(written) && c.node.hadADD(file):
			c.added[file] = written
		default:
			others[file] = written
		}
	}
	for file := range c.added {
		if _, is := files[file]; !is {
			delete(c.added, file)
		}
	}
	changed := !maps.EqualFunc(c.before, others, time.Time.Equal)
	c.before = others
	return changed
}

// hadADD reports whether the attachment of a file in the cache had an ADD of the plugin. The file need not be
// readable.
func (n *Node) hadADD(file string) bool {
	for _, x := range podinfo.InFileName(file) {
		had, err := n.Dir.Attached(attachmentOf(x))
		if had && err == nil {
			return true
		}
	}
	return false
}

func attachmentOf(x podinfo.Cached) store.Attachment {
	return store.Attachment{Network: x.Network, ContainerID: x.ContainerID, IfName: x.IfName}
}

// syncCachedPods records the pods of networks with a plugin entry that have no record, and forgets those
// whose file or network namespace does not exist any more. A file that cannot be read, or a namespace, says
// nothing about its pod: what is recorded stays, and what is not is reported. A file that was decided about
// counts again after it is written again, or another network has an entry: a DEL of the plugin comes before
// the runtime removes the file.
func (n *Node) syncCachedPods(src *Sources) (result cacheSync) {
	c := n.cached
	files, err := n.readCache()
	if files == nil {
		return cacheSync{warnings: []error{err}}
	}
	wasFresh, changed := c.fresh, false
	err = c.begin(n.Dir, src, files)
	result.warnings = append(result.warnings, err)
	forgot, warnings := n.forgetCachedPods(files)
	result.warnings = append(result.warnings, warnings...)
	for _, file := range slices.Sorted(maps.Keys(files)) {
		if c.seen[file].Equal(files[file]) {
			continue
		}
		decision := n.decide(file, src)
		if decision.record {
			recorded, err := n.recordCached(file, decision.pod, files[file])
			changed = changed || recorded
			if err != nil {
				const reason = "its record cannot be written"
				decision.without = &UnrecordedPod{File: file, Reason: reason, Detail: err.Error()}
			}
		}
		_, isRecorded := c.recorded[file]
		switch {
		case decision.without == nil && !decision.again:
			c.seen[file] = files[file]
		case decision.without != nil && !isRecorded: // it is tried again
			result.unrecorded = append(result.unrecorded, *decision.without)
		}
	}
	c.fresh = c.fresh || changed
	becameFresh := c.fresh && !wasFresh
	result.unwritten = changed || forgot || becameFresh
	return result
}

// forgetCachedPods removes the records of pods that have gone, and returns whether it removed some. One that
// cannot be removed is tried again at the next sync.
func (n *Node) forgetCachedPods(files map[string]time.Time) (forgot bool, warnings []error) {
	c := n.cached
	for _, file := range slices.Sorted(maps.Keys(c.recorded)) {
		if !n.hasGone(file, files) {
			continue
		}
		err := n.Dir.DetachCached(c.recorded[file])
		if err != nil {
			warnings = append(warnings, err)
			continue
		}
		delete(c.recorded, file)
		forgot = true
	}
	for file := range c.seen {
		if _, is := files[file]; !is {
			delete(c.seen, file)
		}
	}
	return forgot, warnings
}

// readCache returns the files of the cache with their times, or nil if nothing is known about them.
func (n *Node) readCache() (map[string]time.Time, error) {
	if n.CacheDir == "" {
		return nil, nil
	}
	files, err := podinfo.CacheFiles(n.CacheDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return files, err
}

// hasGone reports whether a file does not exist any more, or its network namespace.
func (n *Node) hasGone(file string, files map[string]time.Time) bool {
	if _, is := files[file]; !is {
		return true
	}
	_, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file))
	return errors.Is(err, podinfo.ErrNoNetNS)
}

// cacheDecision is what becomes of a file in the cache. The zero value is that its pod is none of ip-masq's.
type cacheDecision struct {
	record  bool
	pod     podinfo.Cached // to record
	without *UnrecordedPod // why the pod cannot be recorded
	again   bool           // there is nothing to record now, but maybe later, although the file is the same
}

// decide decides about a file in the cache.
func (n *Node) decide(file string, src *Sources) cacheDecision {
	x, err := podinfo.ReadCached(filepath.Join(n.CacheDir, file))
	if errors.Is(err, podinfo.ErrNoNetNS) || errors.Is(err, fs.ErrNotExist) {
		return cacheDecision{again: true}
	}
	network := x.Network
	if network == "" {
		network = networkInName(file, src.ConfDir)
	}
	list := src.PluginFile.Conflist(src.ConfDir, network)
	if network == "" || list == nil {
		return cacheDecision{}
	}
	without := &UnrecordedPod{File: file}
	unreadable, isUnreadable := errors.AsType[*podinfo.UnreadableError](err)
	switch {
	case isUnreadable:
		without.Reason = unreadable.Reason
		if unreadable.Err != nil {
			without.Detail = unreadable.Err.Error()
		}
	case src.PluginFile.Present && !x.SameConfig(list.Doc, config.PluginType):
		without.Reason = "the runtime's configuration is not that of the conflist without the plugin entry"
	default:
		return cacheDecision{record: true, pod: x}
	}
	if n.hadADD(file) {
		return cacheDecision{}
	}
	return cacheDecision{without: without}
}

// networkInName returns the network of a file in the cache that cannot be read, or "": of several that its
// name may mean, the longest one.
func networkInName(file string, dir config.ConfDir) (network string) {
	for _, x := range podinfo.InFileName(file) {
		isNetwork := func(list config.Conflist) bool { return list.Network == x.Network }
		if slices.ContainsFunc(dir.Conflists, isNetwork) {
			network = x.Network
		}
	}
	return network
}

// UnrecordedPods returns the pods of the cache that have no record, for a command on a node without a
// reconciler. It writes nothing.
func (n *Node) UnrecordedPods(r *Report) (all []UnrecordedPod) {
	if !r.mayRecord() {
		return nil
	}
	files, err := n.readCache()
	r.warn(err)
	for _, file := range slices.Sorted(maps.Keys(files)) {
		decision := n.decide(file, r.Sources)
		if decision.record {
			decision.without = &UnrecordedPod{File: file, Reason: "no reconciler has recorded it"}
		}
		if decision.without != nil && !n.hasRecord(file) {
			all = append(all, *decision.without)
		}
	}
	return all
}

// hasRecord reports whether the attachment of a file in the cache has a record. The file need not be
// readable.
func (n *Node) hasRecord(file string) bool {
	for _, x := range podinfo.InFileName(file) {
		p, err := n.Dir.Pod(attachmentOf(x))
		if p != nil && err == nil {
			return true
		}
	}
	return false
}

// DescribeUnrecorded returns a line for each cause.
func DescribeUnrecorded(pods []UnrecordedPod) (lines []string) {
	first, count := map[string]UnrecordedPod{}, map[string]int{}
	for _, p := range pods {
		if count[p.Reason] == 0 {
			first[p.Reason] = p
		}
		count[p.Reason]++
	}
	for _, reason := range slices.Sorted(maps.Keys(count)) {
		p := first[reason]
		line := fmt.Sprintf("%d of the runtime's cache: %s (such as %s", count[reason], reason, p.File)
		if p.Detail != "" {
			line += ": " + p.Detail
		}
		lines = append(lines, line+")")
	}
	return lines
}

// begin makes the state that of the records on disk, and lets the files of all networks count again if others
// have an entry. With an error there may be other records, which the next sync reads.
func (c *cachedPods) begin(dir *store.Dir, src *Sources, files map[string]time.Time) (err error) {
	if !c.isRead {
		err = c.readRecords(dir, files)
		c.isRead = err == nil
	}
	var networks []string
	for _, list := range src.ConfDir.Conflists {
		if len(list.Entries) > 0 {
			networks = append(networks, list.Network, string(list.Doc))
		}
	}
	if slices.Equal(networks, c.networks) {
		return err
	}
	c.networks = networks
	for file := range c.seen {
		if _, isRecorded := c.recorded[file]; !isRecorded {
			delete(c.seen, file)
		}
	}
	return err
}

// readRecords adds the records on disk to those that are known.
func (c *cachedPods) readRecords(dir *store.Dir, files map[string]time.Time) error {
	if c.recorded == nil {
		c.recorded, c.seen = map[string]store.Attachment{}, map[string]time.Time{}
	}
	pods, _, err := dir.Pods()
	for _, p := range pods {
		if !p.Cached {
			continue
		}
		x := podinfo.Cached{Network: p.Network, ContainerID: p.ContainerID, IfName: p.IfName}
		file := x.File()
		if _, isKnown := c.recorded[file]; !isKnown {
			c.recorded[file] = p.Attachment
			c.seen[file] = files[file]
			c.fresh = true
		}
	}
	return err
}

// recordCached records a pod. One that is recorded is replaced, as the runtime has written its file again.
// Its record is as old as its file, which orders pods of the cache that have one address; an ADD's record
// wins against all of them.
func (n *Node) recordCached(file string, x podinfo.Cached, written time.Time) (recorded bool, err error) {
	a := attachmentOf(x)
	recorded, err = n.Dir.AttachCached(store.Pod{
		Attachment: a, At: written.Sub(booted()).Nanoseconds(),
		Namespace: x.Namespace, Name: x.Name, Addresses: x.Addresses,
	})
	if recorded {
		n.cached.recorded[file] = a
	}
	return recorded, err
}
